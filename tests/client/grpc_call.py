"""Calls of a gRPC port without generated code: messages are bytes, or come from tests/wires."""

import grpc
from patience import PATIENCE_S


def plain(message):
    return message


def unary(channel, path, message=b"", **metadata):
    """Returns the answer, whose code is that of an error if the call fails."""
    call = channel.unary_unary(path, request_serializer=plain, response_deserializer=plain)
    return call(message, timeout=PATIENCE_S, metadata=tuple(metadata.items()))


def stream(channel, path, message=b"", **metadata):
    call = channel.unary_stream(path, request_serializer=plain, response_deserializer=plain)
    return call(message, timeout=PATIENCE_S, metadata=tuple(metadata.items()))


def failure(channel, path, message=b"", **metadata):
    """Returns the code and the details of a call that must fail."""
    try:
        unary(channel, path, message, **metadata)
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError("the call has succeeded")
