"""Hardware platforms that SpaceServe adds to SGLang from outside its source tree."""
