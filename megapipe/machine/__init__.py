"""What this machine is, as its system tells: torch-free, reads /proc and /sys, changes nothing. `comm` and `doctor` ask.

- `interfaces`: network interfaces with their addresses, and which of them leads to an address
- `fabric`:     InfiniBand and RoCE ports, and whether GPUs and network cards can exchange data directly
- `resources`:  cores, memory, shared memory, limits
- `packages`:   versions of installed packages, without importing them
"""
