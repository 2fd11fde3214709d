"""The only translator between our values and ``heterorl.v1``.

Nothing that comes off the wire is believed: ``checks`` has what a message must meet, lengths are compared
before arrays are made, and what does not fit is a ``RefusedError``. Rules about meaning (finite, in range,
wanted) are kept with the values. Fields that this version does not know are ignored, as protobuf promises;
enum values that it does not know are refused."""
