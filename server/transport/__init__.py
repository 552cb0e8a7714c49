"""HTTP beneath the protocol: who may talk to the server, how long that may take, bodies, streams, logs."""
