"""Prints pip constraints that hold every dependency in pyproject.toml to its lower bound."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"].values()
requirements = [*project["dependencies"], *(name for extra in extras for name in extra)]
for requirement in sorted(set(requirements)):
    name, bound = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?(?:[>=]=(.+))?", requirement).groups()
    if name != project["name"]:
        print(f"{name}=={bound}")
