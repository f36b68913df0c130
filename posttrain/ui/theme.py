"""The project's design as a Gradio theme: system fonts, so that no page asks another host for anything."""

from pathlib import Path

import gradio as gr

from posttrain.reports import design

FAVICON = Path(__file__).with_name("favicon.svg")
CSS = design.TOKENS + design.PARTS + Path(__file__).with_name("style.css").read_text(encoding="utf-8")
HEAD = (
    f'<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer"><style>{CSS}</style>'
)

SANS, MONO = ([name.strip().strip('"') for name in font.split(",")] for font in (design.FONT, design.MONO))

# Gradio's variables that take a colour of the palette, in light and dark alike: the palette itself changes.
COLOURS = {
    "body_background_fill": "ground",
    "body_text_color": "ink",
    "body_text_color_subdued": "quiet",
    "background_fill_primary": "ground",
    "background_fill_secondary": "raised",
    "border_color_primary": "line",
    "block_background_fill": "ground",
    "block_border_color": "line",
    "block_label_background_fill": "raised",
    "block_label_text_color": "quiet",
    "block_title_text_color": "ink",
    "block_info_text_color": "quiet",
    "input_background_fill": "ground",
    "input_border_color": "line",
    "input_border_color_focus": "accent",
    "input_placeholder_color": "quiet",
    "button_primary_background_fill": "accent",
    "button_primary_background_fill_hover": "accent",
    "button_primary_border_color": "accent",
    "button_primary_text_color": "ground",
    "button_primary_text_color_hover": "ground",
    "button_secondary_background_fill": "raised",
    "button_secondary_background_fill_hover": "line",
    "button_secondary_border_color": "line",
    "button_secondary_text_color": "ink",
    "link_text_color": "accent",
    "link_text_color_hover": "accent",
    "link_text_color_active": "accent",
    "link_text_color_visited": "accent",
    "color_accent": "accent",
    "color_accent_soft": "raised",
    "border_color_accent": "accent",
    "checkbox_background_color_selected": "accent",
    "checkbox_border_color_selected": "accent",
    "checkbox_border_color_focus": "accent",
    "checkbox_label_background_fill": "ground",
    "checkbox_label_background_fill_selected": "raised",
    "checkbox_label_text_color": "ink",
    "panel_background_fill": "raised",
    "panel_border_color": "line",
    "slider_color": "accent",
    "stat_background_fill": "accent",
    "table_border_color": "line",
    "table_even_background_fill": "ground",
    "table_odd_background_fill": "ground",
    "table_text_color": "ink",
    "code_background_fill": "raised",
}


def theme() -> gr.themes.Base:
    made = gr.themes.Base(font=SANS, font_mono=MONO, radius_size="sm", spacing_size="md", text_size="md")
    values = {name: f"var(--{colour})" for name, colour in COLOURS.items()}
    known = vars(made)
    dark = {f"{name}_dark": value for name, value in values.items() if f"{name}_dark" in known}
    return made.set(**values, **dark, block_shadow="none", button_primary_shadow="none", button_secondary_shadow="none")


THEME = theme()
