"""An Open Service Broker (API 2.17) whose service instances are launched runs."""
