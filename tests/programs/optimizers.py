"""The optimizers that the programs share.

Adam divides a gradient by the root of its own square. With the usual `eps` of 1e-8 that has two
effects that a comparison must not have: a gradient that is wrong by a constant factor leads to the
same update, and a gradient that is zero in exact arithmetic, so that only rounding noise of 1e-9 is
left of it, leads to a full-sized update in a random direction. With `EPS` as large as the gradients
of these small models, an update is nearly proportional to its gradient: a wrong factor shows, noise
stays noise.
"""

import optax

EPS = 1e-2
"""Added to the root of the second moment by every optimizer of the Adam family here."""


def clipped_adamw(learning_rate: float = 1e-2) -> optax.GradientTransformation:
    """AdamW with clipping by the global norm and a warm-up, as language models are trained.

    The clipping bound is below the norm that gradients have at first, so that it takes effect.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=learning_rate / 10, peak_value=learning_rate, warmup_steps=2, decay_steps=20
    )
    return optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(schedule, b2=0.95, eps=EPS, weight_decay=0.01),
    )


def adam(learning_rate: float = 1e-2) -> optax.GradientTransformation:
    """Plain Adam."""
    return optax.adam(learning_rate, eps=EPS)


def sgd(learning_rate: float = 0.05) -> optax.GradientTransformation:
    """SGD with momentum: after the first step its trace is the gradient itself, leaf by leaf."""
    return optax.sgd(learning_rate, momentum=0.9)


def momentum(learning_rate: float = 0.05) -> optax.GradientTransformation:
    """SGD with Nesterov momentum and weight decay, as convolutional networks are trained."""
    return optax.chain(
        optax.add_decayed_weights(1e-4),
        optax.sgd(learning_rate, momentum=0.9, nesterov=True),
    )


BY_NAME = {"clipped_adamw": clipped_adamw, "adam": adam, "sgd": sgd, "momentum": momentum}
"""Optimizers by name, for the settings of the registry."""
