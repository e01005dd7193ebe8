"""Questions to the host: its cores, memory, control groups, processes and users.

Begin with machine.py (cores, memory) and process.py (parents, signals, the end of the script).
It may import `errors`, `failpoints` and `hooks`.
"""
