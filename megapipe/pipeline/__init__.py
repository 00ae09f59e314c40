"""The engine that runs one rank's row of a pipeline schedule, for any nn.Module stages.

    engine     Engine: one loop over the row with a handler for each op
    stage      StageRunner: forward, backward, backward_input, backward_weight of one stage
    offload    Offload: activations in host memory between forward and backward
    graphs     RankGraphs: forwards and backwards captured as CUDA graphs; CapturedStage replays them

Stages may be any modules that take and return tensors, `loss` any function of the last stage's output. Users train
theirs with `megapipe.Pipeline` (api/pipeline.py).
"""
