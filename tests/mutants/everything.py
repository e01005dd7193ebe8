"""All mistakes."""

from mutants import of_devices, of_second_order, of_service, of_state, of_training

MUTANTS = (
    *of_state.MUTANTS,
    *of_service.MUTANTS,
    *of_training.MUTANTS,
    *of_second_order.MUTANTS,
    *of_devices.MUTANTS,
)
