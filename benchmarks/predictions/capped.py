"""Run a script with an allocator that may reserve so many bytes, as in `python capped.py 8589934592 train.py`."""

import sys

import torch

from hotloop.scripts.as_main import run_as_main

torch.cuda.set_per_process_memory_fraction(int(sys.argv[1]) / torch.cuda.get_device_properties(0).total_memory)
run_as_main(sys.argv[2], sys.argv[3:])
