# style: a Hugging Face GPT-2 with a tiny configuration, a linear schedule, generate at the end
# steps: 4
# expect: nothing

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=4)
    for _ in range(4):
        ids = torch.randint(1, 64, (4, 16), device=device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    prompt = torch.tensor([[5, 6, 7]], device=device)
    mask = torch.ones_like(prompt)
    text = model.generate(prompt, attention_mask=mask, max_new_tokens=5, do_sample=True, top_k=10)
    print(loss.item(), tuple(text.shape))


if __name__ == "__main__":
    main()
