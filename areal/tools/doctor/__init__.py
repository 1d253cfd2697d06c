"""What one run of an agent would be to training: found in the stored rows, judged, and said with what to change.

    found = await diagnose(store, turn_discount=1.0)                         # diagnosis.py: sessions, turns, tokens, rows
    findings = judge(found, run, requests, setting)                         # findings.py: what is lost, what it costs, what to do
    print(as_text(report)), as_json(report)                                 # report.py

The command is areal/doctor.py: it starts the processes and runs the agent.
"""
