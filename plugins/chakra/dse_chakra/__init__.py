"""Files of Chakra, the execution traces of MLCommons: `files` reads and writes them, `messages` has their schema."""
