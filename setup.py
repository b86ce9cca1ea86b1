"""The packages of a distribution; everything else about it is in setup.cfg.

``find:`` in setup.cfg would find the packages of ``llmtrain``, but not the folders that
``package_dir`` puts among them.
"""

from setuptools import find_packages, setup

FOLDERS_BESIDE_THE_PACKAGE = ["llmtrain.recipes", "llmtrain.accelerate_configs"]

setup(
    packages=[
        *find_packages(include=["llmtrain", "llmtrain.*"]),
        *FOLDERS_BESIDE_THE_PACKAGE,
    ],
)
