"""What the pages of `posttrain ui` show: pure functions from run folders and databases to HTML, without gradio and torch."""
