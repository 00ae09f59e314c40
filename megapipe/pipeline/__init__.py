"""The machine that runs one rank's row of a pipeline schedule, for any nn.Module stages.

- `pipeline`: `Pipeline`: from modules, a message and a loss to training steps; `pipeline_ranks`: the ranks for it. The door for models of
              one's own
- `stage`:    `StageRunner`: forward, backward, backward_input, backward_weight of one stage
- `engine`:   `Engine`: one loop over the row; a handler for each op, no decision of its own
- `offload`, `copies`: `Offload`: activations in the host's memory between forward and backward, and the streams that carry them
- `graphs`:   `RankGraphs`: forwards and backwards recorded as CUDA graphs; `CapturedStage` replays them where a runner would compute
- `streams`:  `StageStreams`: on a GPU a stream for each stage, so that the halves of an overlapped pair run at one time
- `device_clock`: moments of a device's work on the host's clock: events in a GPU's streams, for profiles, stragglers and calibration

Stages may be any modules that take and return tensors, `loss` any function of the last stage's output; examples/vision_transformer.py.
"""
