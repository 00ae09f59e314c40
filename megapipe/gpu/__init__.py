"""Whatever is specific to GPUs: kernels of optional libraries, streams, copies, timing.

    kernels       Kernels: the implementations that the configuration chose; torch.compile for pointwise functions
    libraries     adapters of apex, flash-attn and NVIDIA's Transformer Engine, and how each is installed
    streams       a stream for each stage of a rank; copies between device and host memory, and of numbers to the host
    meta_results  results of functions without values, which torch would find slowly
    device_clock  CUDA events as times of the host's clock; timers of the phases of a step

An optional library is imported in one file, only when the configuration names it. The CPU tests run the adapters
against stubs with the libraries' signatures (tests/gpu/stand_ins); docs/gpu.md says what has run on a GPU.
"""
