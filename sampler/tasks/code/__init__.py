"""The grader ``code``: programs that the policy wrote, run against a row's tests in a sandbox."""
