"""The native part: C kernels compiled one by one with their own flags, and one C++ file that binds them to torch.

A `.c` file among an extension's sources would be compiled with the flags of the whole extension (and as C++ by some
build backends), so the C objects are built here and handed to the linker.
"""

import os
import platform
import sys
import sysconfig
from pathlib import Path

import pybind11
import torch
from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from torch.utils.cpp_extension import include_paths, library_paths

BASELINE = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-Wall", "-Wextra"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]

C_SOURCES = {
    "csrc/core/status.c": [],
    "csrc/core/cpu.c": [],
    "csrc/core/dispatch.c": [],
    "csrc/core/hugepage.c": [],
    "csrc/core/token_logprob.c": [],
    "csrc/arch/generic/token_logprob_generic.c": [],
    "csrc/arch/x86/token_logprob_avx2.c": AVX2,
    "csrc/arch/x86/token_logprob_avx512.c": AVX512,
    "csrc/arch/arm/token_logprob_neon.c": [],
}
FAMILIES = {"x86_64": "x86", "AMD64": "x86", "aarch64": "arm", "arm64": "arm"}  # the folder for each machine

HEADERS = sorted(str(path) for path in Path("csrc").rglob("*") if path.suffix in (".h", ".def"))


class BuildNative(build_ext):
    def build_extension(self, ext):
        folders = {"core", "generic", FAMILIES.get(platform.machine())}
        for source, flags in C_SOURCES.items():
            if Path(source).parent.name not in folders:
                continue
            ext.extra_objects += self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=BASELINE + flags, depends=HEADERS
            )
        super().build_extension(ext)


AUTOLOAD = "memlean_autoload.pth"  # does nothing unless MEMLEAN_PATCH is set


class BuildPython(build_py):
    """Python looks for .pth files beside the packages: in a wheel, that is the root of what is built."""

    def run(self):
        super().run()
        if not self.editable_mode:
            self.copy_file(AUTOLOAD, os.path.join(self.build_lib, AUTOLOAD))


class WithData(Distribution):
    """An editable install has no such root: there the file goes to site-packages as data.

    setuptools' editable_wheel asks for has_data(), which nothing defines, and leaves data files out otherwise.
    """

    has_data = Distribution.has_data_files


site_packages = os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))


native = Extension(
    "memlean._C",
    ["csrc/torch/binding.cpp"],
    depends=HEADERS,
    include_dirs=[*include_paths(), pybind11.get_include()],
    library_dirs=library_paths(),
    libraries=["c10", "torch_cpu"],
    define_macros=[
        ("TORCH_TARGET_VERSION", "0x020a000000000000"),  # the oldest torch whose stable C API is enough: 2.10
        ("MEMLEAN_BUILT_WITH_TORCH", f'"{torch.__version__}"'),
    ],
    extra_compile_args=["-O2", "-fvisibility=hidden"],
    language="c++",
)

setup(
    ext_modules=[native],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython},
    distclass=WithData,
    data_files=[(site_packages, [AUTOLOAD])] if "editable_wheel" in sys.argv else [],
)
