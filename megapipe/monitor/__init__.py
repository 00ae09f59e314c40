"""Who does what now, and who is missing when a run hangs. Torch-free; `comm` and `pipeline` write, `train` and `megapipe status` read.

- `record`:    what one rank does now, as fixed-size bytes in which a torn read is noticed
- `heartbeat`: the writer of a rank's record, in shared memory
- `wait_clock`: how long a rank waits in a step, and for whom
- `stragglers`: from the times of all ranks to who is slow; pure
- `roster`:    who the ranks are: host, process, place in the grid, groups
- `process`:   what the kernel says of a process of this host
- `sighting`:  a rank as seen from outside: record, age, process
- `diagnosis`: from sightings to the rank that the others wait for; pure
- `words`:     a diagnosis and a table of sightings as text
- `folder`:    the run's folder: where the records of its ranks lie, and copies for later
- `watchdog`:  the thread that looks, reports once, and ends the rank
"""
