"""Search methods by name. A method is one module with `METHOD` (a `MakeMethod`), and one YAML in `conf/search`."""
