"""The pages of `posttrain ui`, in Gradio: thin, since posttrain.viewing has what they show. Imports no torch."""
