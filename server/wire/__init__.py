"""What clients send, as typed models: types and bounds are checked here, meanings by who answers."""
