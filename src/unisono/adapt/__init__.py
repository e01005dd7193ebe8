"""Policies that adapt a training while it runs, and the measurements that they see.

policy_names.py lists the policies, view.py what they see, and norms.py how noise is measured.
It may import `plan` and what lies below it; a policy gets values and gives values.
"""
