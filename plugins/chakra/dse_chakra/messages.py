"""Messages of Chakra execution traces: MLCommons' schema `et_def.proto` (package ChakraProtoMsg), built at run time.

`GlobalMetadata` opens a file, a `Node` follows for each task. Fields and their numbers are those of the schema in
https://github.com/mlcommons/chakra (schema/protobuf/et_def.proto, version 1.0.0 of 2026-05); fields that are not
listed here are skipped by the reader, as protobuf does with fields it does not know.
"""

from __future__ import annotations

from functools import cache
from typing import Any

NODE_TYPES = (
    "INVALID_NODE",
    "METADATA_NODE",
    "MEM_LOAD_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
)
"""`NodeType`, by number."""
COLLECTIVES = (
    "ALL_REDUCE",
    "REDUCE",
    "ALL_GATHER",
    "GATHER",
    "SCATTER",
    "BROADCAST",
    "ALL_TO_ALL",
    "REDUCE_SCATTER",
    "REDUCE_SCATTER_BLOCK",
    "BARRIER",
)
"""`CollectiveCommType`, by number."""

_PACKAGE = "ChakraProtoMsg"
_SCALARS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
_FIRST_VALUE = 3  # number of the first field of an attribute's value; each type has one of a value and one of a list


@cache
def message(name: str) -> Any:
    """The class of a message: `GlobalMetadata`, `Node` or `AttributeProto`."""
    from google.protobuf import descriptor_pool, message_factory

    # a pool of its own: Chakra's package, where installed, declares the same names in the default one
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(_schema().SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def _schema() -> Any:
    """The file that declares the messages."""
    from google.protobuf import descriptor_pb2

    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")
    _attribute(file)
    for name, fields in {
        "GlobalMetadata": [("version", 1, "string", False), ("attr", 2, "AttributeProto", True)],
        "Node": [
            *[("id", 1, "uint64", False), ("name", 2, "string", False), ("type", 3, "int32", False)],
            *[("ctrl_deps", 4, "uint64", True), ("data_deps", 5, "uint64", True)],
            *[("start_time_micros", 6, "uint64", False), ("duration_micros", 7, "uint64", False)],
            ("attr", 10, "AttributeProto", True),
        ],
    }.items():
        declared = file.message_type.add(name=name)
        for field in fields:
            _add(declared, *field)
    return file


def _attribute(file: Any) -> None:
    """Declare `AttributeProto`: a name, and one value or list of values of any scalar type."""
    declared = file.message_type.add(name="AttributeProto")
    _add(declared, "name", 1, "string", False)
    _add(declared, "doc_string", 2, "string", False)
    declared.oneof_decl.add(name="value")
    for place, scalar in enumerate(_SCALARS):
        name = f"{scalar.capitalize()}List"
        _add(file.message_type.add(name=name), "values", 1, scalar, True)
        first = _FIRST_VALUE + 2 * place
        _add(declared, f"{scalar}_val", first, scalar, False).oneof_index = 0
        _add(declared, f"{scalar}_list", first + 1, name, False).oneof_index = 0


def _add(declared: Any, name: str, number: int, kind: str, repeated: bool) -> Any:
    """Declare a field of a scalar type or of a message. An enumeration is an int32, which has the same encoding."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

    field = declared.field.add(name=name, number=number)
    field.label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
    if kind in _SCALARS:
        field.type = getattr(Field, f"TYPE_{kind.upper()}")
    else:
        field.type, field.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    return field
