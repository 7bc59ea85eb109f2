"""Install `tegrad.pth` beside the package, from a wheel and from an editable install alike.

Python reads `.pth` files from its site directories only, and no setting of setuptools puts one there: a data file that
goes where the package goes does. All else is in pyproject.toml.
"""

import runpy
from pathlib import Path

if complaint := runpy.run_path(str(Path(__file__).parent / "tegrad" / "_python.py"))["complaint"]():
    raise SystemExit(complaint)  # before pip finds that nothing fits

from setuptools import Distribution, setup
from setuptools.command.install import install  # noqa: F401  (makes distutils setuptools' own)

from distutils.command.install_data import install_data  # isort: skip


class InstallBesidePackage(install_data):
    """Data files go to the directory that holds the package: the root of a wheel."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.install_dir = self.get_finalized_command("install").install_purelib


class DistributionWithData(Distribution):
    """Answers the question by which editable installs decide whether there is data to install."""

    def has_data(self) -> bool:
        return bool(self.has_data_files())


setup(
    distclass=DistributionWithData,
    cmdclass={"install_data": InstallBesidePackage},
    data_files=[("", ["tegrad.pth"])],
)
