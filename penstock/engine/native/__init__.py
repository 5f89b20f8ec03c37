"""Native CPU kernels: C++ behind a plain C ABI, called on torch tensors.

`NativeLibrary()` loads the library or raises `KernelsUnavailable` with the reason; code that wires the engine
asks once and falls back to torch. `weights` packs, `ops` computes; `kernels/` is the C++.
Why and how: docs/design/003-native-cpu-kernels.md.
"""

from penstock.engine.native.library import KernelsUnavailable, NativeLibrary

__all__ = ["KernelsUnavailable", "NativeLibrary"]
