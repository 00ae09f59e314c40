"""The door to other ranks: the only room that calls torch.distributed, so that everything sent has a name, a time-out and a trace.

- `bootstrap`:   `start` joins the world (gloo on CPU, NCCL on GPUs), `shutdown` leaves it
- `store`:       where the ranks meet, listening on one interface alone
- `groups`:      `Group` is a named list of ranks with its process group; `build_process_groups` makes all of them from a topology
- `collectives`: all_reduce, all_gather, reduce_scatter, broadcast, barrier, objects; a group of one is a no-op everywhere
- `wire`:        how objects travel: as JSON, nothing is unpickled
- `channels`:    `Channel`, one direction of one stage boundary between two pipeline ranks, first-in first-out
- `ping`:        messages to and fro, timed: for clocks that are compared, and for what a message takes
- `failures`:    what a RuntimeError of a backend means, as a `CommunicationError` that names group, operation and peer
- `torch_checkpoint`: a folder of torch.distributed.checkpoint, written without a process group
- `fake_backend`: process groups of the dry run, which move nothing and count operations in a `Ledger`
- `trace`:       `Tracer`, launch and completion of all of this, when asked

Groups are arguments: no rank, group or backend stands in a module's globals.
"""
