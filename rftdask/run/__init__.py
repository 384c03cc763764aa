"""One run: its folder and who owns it (run_folder.py), the checks before it (preflight.py), the stages that start the
roles on a cluster and watch them (stage.py), and what a person is told of it (view.py, summary.py, report.py).

The folder does not know what a role does in its loop (explorer/, trainer/), nor how workers are started (cluster/).
"""
