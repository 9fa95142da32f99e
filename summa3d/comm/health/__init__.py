"""The health of a job: what its ranks agree on, where each of them is, and how it ends when one fails, stops or hangs.

`agreement.py`: one error on every rank, calls that are compared. `failure.py`: an exception of one rank ends the job.
`signatures.py`: what each member of an axis has called, in the node's memory. `flight.py`, `flight_files.py`: the last
communications of each rank, and their files. `processes.py`: what the system says of a process. `watchdog.py`: stopped,
sleeping and waiting ranks end the job.
"""
