"use strict";
// Before the report draws: in a frame only what is seen.
if (document.documentElement.dataset.embed) {
  const react = Plotly.react;
  Plotly.react = (id, ...rest) => (document.getElementById(id).offsetParent ? react(id, ...rest) : Promise.resolve());
}
