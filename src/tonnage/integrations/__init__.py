"""Integrations: pytest, the Trainers of Hugging Face and Lightning, notebooks.

    tonnage.integrations.pytest_plugin           @pytest.mark.gpu_memory(limit="2 GiB"); loaded by pytest itself
    tonnage.integrations.transformers_callback   MemoryCallback for the Hugging Face Trainer
    tonnage.integrations.lightning_callback      MemoryCallback for Lightning
    tonnage.integrations.fit_trainer             tonnage.fit_trainer(trainer, budget="40 GiB") for the Hugging Face Trainer
    tonnage.integrations.fit_lightning           FitCallback(budget="40 GiB") for Lightning
    tonnage.integrations.notebook                %load_ext tonnage

None of them is imported here.
"""
