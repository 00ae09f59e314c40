"""Communication between ranks: in the core only this package calls torch.distributed.

- `bootstrap`:    `start` initializes torch.distributed (gloo on CPUs, NCCL on GPUs), `shutdown` leaves it
- `meeting`:      ranks arrive at the store and compare digests of facts; `network`: where that store listens
- `groups`:       `Group`, a named list of ranks with its process group; `build_process_groups` creates them all;
                  `fake_process_groups` those of the dry run, which move nothing and count operations in a `Traffic`
- `collectives`:  all_reduce, all_gather, reduce_scatter, broadcast, barrier, objects; in a group of one they do nothing
- `wire`:         objects sent between ranks, as JSON
- `channels`:     `Channel`, messages over one stage boundary in one direction
- `round_trips`:  blocking messages between two ranks, by which clocks are compared
- `trace`:        `Tracer`, a record of all of these
- `nccl`, `store_exchange`: NCCL settings, remote heartbeats

Groups are passed as arguments; there is no global state.
"""
