"""Whatever is specific to GPUs: kernels of optional libraries, streams, copies, timing.

    kernels             Kernels: the implementations that the configuration chose; torch.compile for pointwise functions
    libraries           apex and flash-attn; how each optional library is installed
    transformer_engine  linears, norms, attention and Adam of NVIDIA's Transformer Engine
    copies              copies between device and host memory, for offloading
    streams             a stream for each stage, so that two stages of a rank compute at the same time
    device_clock        CUDA events as times of the host's clock

An optional library is imported in one file, inside a function, and only when the configuration names it (an import
rule). The CPU tests run the adapters against stubs with the libraries' signatures (tests/gpu/stand_ins);
docs/gpu.md says what has run on a GPU.
"""
