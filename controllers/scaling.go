package controllers

import (
	"context"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	appsac "k8s.io/client-go/applyconfigurations/apps/v1"
	autoscalingac "k8s.io/client-go/applyconfigurations/autoscaling/v2"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	policyac "k8s.io/client-go/applyconfigurations/policy/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// scaleOwner is who owns the Deployment's replicas when the controller raises them for the autoscaler. It applies only
// while it has something to say: the autoscaler's next write takes the field over, and nobody fights.
const scaleOwner = client.FieldOwner("flashsale-manager-scale")

// autoscaler may not go below the full size before the sale is a minute old.
func (s *scope) autoscaler() runtime.ApplyConfiguration {
	want := s.sale.Spec.Reserver.Autoscaling
	return autoscalingac.HorizontalPodAutoscaler(reserverName(s.sale), s.sale.Namespace).
		WithLabels(s.labels("reserver")).
		WithSpec(autoscalingac.HorizontalPodAutoscalerSpec().
			WithScaleTargetRef(autoscalingac.CrossVersionObjectReference().
				WithAPIVersion(appsv1.SchemeGroupVersion.String()).WithKind("Deployment").WithName(reserverName(s.sale))).
			WithMinReplicas(s.decision.Least).
			WithMaxReplicas(want.MaxReplicas).
			WithMetrics(autoscalingac.MetricSpec().WithType(autoscalingv2.ResourceMetricSourceType).
				WithResource(autoscalingac.ResourceMetricSource().WithName(corev1.ResourceCPU).
					WithTarget(autoscalingac.MetricTarget().WithType(autoscalingv2.UtilizationMetricType).
						WithAverageUtilization(want.TargetCPUUtilizationPercentage)))))
}

// disruptionBudget lets a node be drained, one pod of the sale at a time.
func (s *scope) disruptionBudget() runtime.ApplyConfiguration {
	return policyac.PodDisruptionBudget(reserverName(s.sale), s.sale.Namespace).
		WithLabels(s.labels("reserver")).
		WithSpec(policyac.PodDisruptionBudgetSpec().
			WithSelector(metav1ac.LabelSelector().WithMatchLabels(s.selector("reserver"))).
			WithMaxUnavailable(intstr.FromInt32(1)))
}

// scale raises the reservation pods to the least there must be, without waiting for the autoscaler, and takes the field
// from the controller's own configuration before that drops it: a field that nobody owns would fall back to one pod.
func (s *scope) scale(ctx context.Context) error {
	if !s.decision.Run || s.sale.Spec.Reserver.Autoscaling == nil {
		return nil
	}
	d := &appsv1.Deployment{}
	if err := s.Get(ctx, client.ObjectKey{Namespace: s.sale.Namespace, Name: reserverName(s.sale)}, d); err != nil || !ours(d, s.sale) {
		return client.IgnoreNotFound(err) // its creation brings the next pass
	}
	now := int32(1)
	if d.Spec.Replicas != nil {
		now = *d.Spec.Replicas
	}
	if now >= s.decision.Least && !ownsReplicas(d.ManagedFields) {
		return nil
	}
	want := appsac.Deployment(d.Name, d.Namespace).WithUID(d.UID).
		WithSpec(appsac.DeploymentSpec().WithReplicas(max(now, s.decision.Least)))
	if err := s.Apply(ctx, want, scaleOwner, client.ForceOwnership); err != nil {
		return fmt.Errorf("scaling Deployment %s: %w", d.Name, err)
	}
	return nil
}

func ownsReplicas(fields []metav1.ManagedFieldsEntry) bool {
	for _, f := range fields {
		if f.Manager == string(fieldOwner) && f.Operation == metav1.ManagedFieldsOperationApply && f.FieldsV1 != nil {
			return strings.Contains(f.FieldsV1.GetRawString(), `"f:replicas"`)
		}
	}
	return false
}
