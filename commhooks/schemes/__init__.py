"""The schemes. Importing this package imports, and so registers, every file that lies in it."""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_file.name)
