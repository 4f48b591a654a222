"""Read what nvidia-smi says.

Your training is PID 7001. Fill in the three answers below, in MiB and as a
PID.
"""

report = """
| Fan  Temp   Perf    Pwr:Usage/Cap |           Memory-Usage | GPU-Util |
| 41%   71C    P2       288W / 300W |  21504MiB /  40960MiB  |      99% |
|  GPU   PID   Type   Process name                      GPU Memory Usage |
|    0   7001     C   python train.py                          15360MiB |
|    0   3318     C   python3 -m ipykernel_launcher             6000MiB |
|    0   1201     G   /usr/lib/xorg/Xorg                         144MiB |
"""

free_mib = 40960 - 21504
others_mib = 6000 + 144
ask_about = 3318
