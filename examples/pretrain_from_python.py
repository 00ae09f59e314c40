"""Pretrains a small GPT from Python, until its loss is low enough. Arguments are further flags of the run.

Start it alone, or with `megapipe launch --nproc-per-node 4 examples/pretrain_from_python.py
--pipeline-model-parallel-size 2`, which trains two replicas of a pipeline of two stages.
"""

import sys

from megapipe import Callback, Config, StepSummary, Trainer


class StopWhenGood(Callback):
    def on_step_end(self, trainer: Trainer, summary: StepSummary) -> None:
        if summary.loss < 3.0:
            trainer.stop()


model = Config(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=64)
run = model.replace(mock_data=True, micro_batch_size=2, global_batch_size=16, train_iters=60, lr=1e-2, eval_iters=0)
trainer = Trainer(Config.from_flags([*run.flags, *sys.argv[1:]]), [StopWhenGood()])
result = trainer.run()
if trainer.rank == 0:
    print(f"stopped after step {result.step} with loss {result.loss:.4f}: {result.reason}")
