"""The shared module beside this file; its functions are attributes of `library`."""

from __future__ import annotations

import pathlib

import tvm_ffi

# Never unloaded: memory that it handed out may outlive every other reference to it.
library = tvm_ffi.load_module(pathlib.Path(__file__).with_name("flashdsa.so"))
