"""Message classes of Google's runtime, made from the tables of tests/wires."""

import json
import re
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

WIRES = Path(__file__).resolve().parents[1] / "wires"
FIELD = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "string": FIELD.TYPE_STRING,
    "bool": FIELD.TYPE_BOOL,
    "uint32": FIELD.TYPE_UINT32,
    "int32": FIELD.TYPE_INT32,
    "int64": FIELD.TYPE_INT64,
    "float": FIELD.TYPE_FLOAT,
    # Its numbers are what tests look at.
    "FinishReason": FIELD.TYPE_INT32,
}
# Messages without rows, of which tests send only the bytes.
OPAQUE = {"MediaItem", "EngineReasoningGate", "KVHintsEnvelope"}


def classes(name, package):
    """Returns the class of each message of a table, by its name without the messages around it."""
    rows = json.loads((WIRES / f"{name}.json").read_text())
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package=package, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    names = dict.fromkeys(row[0].split(".")[-1] for row in rows) | dict.fromkeys(OPAQUE)
    messages = {message: file.message_type.add(name=message) for message in names}
    for message, field, number, kind, label, oneof, _ in rows:
        add_field(messages[message.split(".")[-1]], package, field, number, kind, label, oneof)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    of = message_factory.GetMessageClass
    return {message: of(pool.FindMessageTypeByName(f"{package}.{message}")) for message in names}


def add_field(message, package, name, number, kind, label, oneof):
    field = message.field.add(name=name, number=number, label=FIELD.LABEL_OPTIONAL)
    entries = re.fullmatch(r"map<(\w+), (\w+)>", kind)
    if entries:
        entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        for number_of, (part, of) in enumerate(zip(("key", "value"), entries.groups(), strict=True), 1):
            entry.field.add(name=part, number=number_of, label=FIELD.LABEL_OPTIONAL, type=SCALARS[of])
        kind, label = f"{message.name}.{entry.name}", "repeated"
    if label == "repeated":
        field.label = FIELD.LABEL_REPEATED
    if kind in SCALARS:
        field.type = SCALARS[kind]
    else:
        field.type = FIELD.TYPE_MESSAGE
        field.type_name = f".{kind}" if kind.startswith("google.") else f".{package}.{kind}"
    if oneof:
        oneofs = [declared.name for declared in message.oneof_decl]
        if oneof not in oneofs:
            message.oneof_decl.add(name=oneof)
            oneofs.append(oneof)
        field.oneof_index = oneofs.index(oneof)
    elif label == "optional" and kind in SCALARS:
        field.proto3_optional = True
        # Its oneof must come after all real ones, which only messages without others guarantee.
        message.oneof_decl.add(name=f"_{name}")
        field.oneof_index = len(message.oneof_decl) - 1
