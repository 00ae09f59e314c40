"""Token files, the order in which samples are drawn from them, and the way there from text. No torch.

What a reader wants first:

- `build_datasets.py`   a `DatasetRequest` -> the train, valid and test data sets of a run
- `loader.py`           a data set and a number of consumed samples -> the microbatch of a dp rank
- `batch.py`            what a microbatch holds: tokens, labels, loss mask, positions, documents

What stands below, from the file to the sample (formats as Megatron's, so that a run sees the same samples):

- `indexed_file.py`     `PREFIX.bin` + `PREFIX.idx`, read by mmap, written beside and renamed
- `split.py`            `--split 969,30,1` and `--data-path 0.3 A 0.7 B`
- `sample_index.py`     epochs, document order, sample order of one file
- `gpt_dataset.py`      one file as samples of seq_length + 1 tokens
- `blend.py`            several files by weight
- `index_cache.py`      indices kept on disk, built once per machine
- `synthetic.py`        `--mock-data`
- `dataset.py`          the two methods all of them have

And from text to the file:

- `corpus.py`           documents out of real text that is already on the machine
- `text_source.py`      JSON lines, plain text, directory trees
- `preprocess.py`       text -> token files, by several processes
- `merge.py`            several token files -> one
- `statistics.py`       unigram entropy of the tokens, the number a model has to beat
"""
