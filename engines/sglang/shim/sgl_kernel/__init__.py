"""Names of sgl_kernel, whose CPU build is on no registry.

SGLang 0.5.23 with SGLANG_USE_CPU_ENGINE=1 imports some of them (all for speculative decoding) and then
computes in plain torch on a CPU without AMX. Each raises when it is called.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build here")

    missing.__name__ = name
    return missing
