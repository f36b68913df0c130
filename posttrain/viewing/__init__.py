"""What the pages of `posttrain ui` show: functions from run folders and databases to HTML. No gradio, no torch."""
