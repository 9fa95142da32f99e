"""The device of a process: streams, events and copies, and which device a rank takes."""
