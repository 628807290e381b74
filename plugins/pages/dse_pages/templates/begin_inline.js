"use strict";
beginViews((content) => new Inline(content));
