"""Token files and samples drawn from them. No torch; formats and sample order are Megatron's.

- `build_datasets`  `DatasetRequest` (the data flags) -> train, valid and test datasets
- `loader`          dataset and number of consumed samples -> microbatches of a dp rank
- `batch`           one microbatch: tokens, labels, loss mask, position ids, document ids
- `dataset`         the interface of datasets; synthetic samples for --mock-data; `SkippedSamples`
- `gpt_dataset`     samples of one token file: epochs, document order, sample order
- `blend`           several datasets mixed by weight; `index_cache`: shuffled indices kept on disk
- `indexed_file`    token files `PREFIX.bin` and `PREFIX.idx`: reading; `fingerprint`: files compared
"""
