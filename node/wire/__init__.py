"""The only translator between our values and ``heterorl.v1``.

Nothing that comes off the wire is believed here: lengths are compared before arrays are
made, enums are mapped explicitly, and whatever does not fit is a ``RefusedError``. Rules
about meaning (finite, in range, wanted) live with the values, not here. Fields unknown to
this version are ignored, as protobuf promises; enum values unknown to it are refused.
"""
