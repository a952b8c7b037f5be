"""The native part: C kernels compiled one by one with their own flags, and one C++ file that binds them to torch.

A `.c` file among an extension's sources would be compiled with the flags of the whole extension (and as C++ by some
build backends), so the C objects are built here and handed to the linker.
"""

import os
import platform
import sys
import sysconfig
from pathlib import Path

from build_backend import MODE, find_torch
from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CCompilerError

BASELINE = ["-std=c11", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-Wall", "-Wextra"]
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
    def run(self):
        """Builds the library or, unless MEMLEAN_BUILD=require, leaves the reason why not in its place."""
        note = Path("" if self.editable_mode else self.build_lib, "memlean", "_not_built.txt")
        for stale in (note, Path(self.build_lib, self.get_ext_filename(native.name))):
            stale.unlink(missing_ok=True)
        try:
            self.find_headers()
            super().run()
        except (BaseError, CCompilerError, ImportError) as error:
            if MODE == "require":
                raise
            native.optional = True
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(str(error), encoding="utf-8")
            print(f"memlean: installed without its C kernels, the slower generic path is used instead: {error}")

    def find_headers(self):
        if MODE == "skip" or find_torch() is None:
            raise BaseError("MEMLEAN_BUILD=skip" if MODE == "skip" else "no torch >= 2.10 to build with")
        import pybind11

        torch, version = find_torch()
        flags = "; ".join(" ".join(flags) for flags in (BASELINE, AVX2, AVX512))
        native.include_dirs += [str(torch / "include"), pybind11.get_include()]
        native.library_dirs.append(str(torch / "lib"))
        native.extra_compile_args.append(f"-ffile-prefix-map={torch}=torch")  # its headers' errors hold their paths
        native.define_macros += [("MEMLEAN_BUILT_WITH_TORCH", f'"{version}"'), ("MEMLEAN_BUILD_FLAGS", f'"{flags}"')]

    def build_extension(self, ext):
        folders = {"core", "generic", FAMILIES.get(platform.machine())}
        for source, flags in C_SOURCES.items():
            if Path(source).parent.name not in folders:
                continue
            ext.extra_objects += self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=BASELINE + flags, depends=HEADERS
            )
        super().build_extension(ext)


class BuildWheel(bdist_wheel):
    def get_tag(self):
        self.root_is_pure = native.optional
        return super().get_tag()


AUTOLOAD = "memlean_autoload.pth"  # does nothing unless MEMLEAN_PATCH is set


class BuildPython(build_py):
    def run(self):  # Python looks for .pth files beside the packages: in a wheel, that is the root of what is built
        super().run()
        if not self.editable_mode:
            self.copy_file(AUTOLOAD, os.path.join(self.build_lib, AUTOLOAD))


class WithData(Distribution):
    has_data = Distribution.has_data_files  # editable_wheel asks for it, and nothing else defines it


site_packages = os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))

native = Extension(
    "memlean._C",
    ["csrc/torch/binding.cpp"],
    depends=HEADERS,
    libraries=["c10", "torch_cpu"],
    define_macros=[("TORCH_TARGET_VERSION", "0x020a000000000000")],  # the oldest whose stable C API is enough: 2.10
    extra_compile_args=["-O2", "-g0", "-fvisibility=hidden"],
    language="c++",
)

setup(
    ext_modules=[native],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython, "bdist_wheel": BuildWheel},
    distclass=WithData,
    # An editable install has no root of what is built: there the file goes to site-packages as data.
    data_files=[(site_packages, [AUTOLOAD])] if "editable_wheel" in sys.argv else [],
)
