"""Search methods, declared by name in `dse.search.METHODS`; each has one YAML in `conf/search`."""
