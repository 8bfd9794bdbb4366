"use strict";
// Before the report starts: which part of it is asked for, and in which language.
{
  const asked = new URLSearchParams(location.search);
  if (asked.get("embed") === "walk") document.documentElement.dataset.embed = "walk";
  if (["en", "zh"].includes(asked.get("language"))) document.documentElement.lang = asked.get("language");
}
