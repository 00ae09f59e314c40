"""The activity of every rank, and the rank that is missing when a run hangs.

Torch-free; `comm` and `pipeline` write, `train` and `megapipe status` (`extras/report`) read.

- `heartbeat`: what one rank does now, as fixed-size bytes in shared memory; the waits of a step by cause
- `process`:   what the kernel knows of a process of this host
- `roster`:    the ranks of a run: host, process, place in the grid, groups; a rank as others see it; the files of both
- `diagnosis`: from the ranks' records to the rank that the others wait for, and the report of it; pure
- `watchdog`:  the thread that notices a hang, reports once, and ends the rank
- `progress`:  a loop that says how much time is left
- `start_marks`: which ranks of a host are starting; when one of them has ended, the others end too
- `signals`:   signals that end a process at once, before the first step of a run; standard output that a full disk or a
  closed pipe cannot turn into an error
"""
