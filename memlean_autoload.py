"""Patches the trainers named in MEMLEAN_PATCH when a process imports them: memlean_autoload.pth calls `install`.

For processes whose first line nobody can edit: Ray workers, what a launcher starts. Imports nothing but sys until one
of the trainers is imported; a process that never does so pays for one look at each import.
"""

import sys


def install(names: str) -> None:
    """Waits for the packages in a comma-separated list of targets and fixes (``twinkle,other.some_fix``)."""
    sys.meta_path.insert(0, _AtImport(names))


class _AtImport:
    def __init__(self, names: str):
        self.names = [name.strip() for name in names.split(",") if name.strip()]
        self.packages = {name.partition(".")[0] for name in self.names}
        self.done = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self.packages and not self.done:
            self.done = True
            import memlean
            from memlean import _env

            try:
                memlean.patch(*self.names, mask=_env.patch_mask(), tp=_env.patch_tp())  # type: ignore[arg-type]
            except (memlean.PatchError, TypeError, ValueError) as error:
                if _env.patch_strict():
                    raise
                print(f"memlean: MEMLEAN_PATCH={','.join(self.names)} not applied: {error}", file=sys.stderr)
        return None  # the other finders find it
