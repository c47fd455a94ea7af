from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Error(_message.Message):
    __slots__ = ("kind", "what", "fix", "leader")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    kind: str
    what: str
    fix: str
    leader: str
    def __init__(self, kind: _Optional[str] = ..., what: _Optional[str] = ..., fix: _Optional[str] = ..., leader: _Optional[str] = ...) -> None: ...
